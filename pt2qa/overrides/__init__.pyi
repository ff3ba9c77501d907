"""The public names of pt2qa.overrides, and the modules that they are imported from on first use."""

# plans
from .plan import Edit as Edit, EditKind as EditKind, OverridePlan as OverridePlan

# what they do to an annotation
from .annotations import (
    AnnotatedOp as AnnotatedOp,
    Annotations as Annotations,
    Edge as Edge,
    fusions_in as fusions_in,
    sites_on as sites_on,
)
from .edited import annotations_of as annotations_of, fusions as fusions
