"""The public names of pt2qa.plugins, and the modules that they are imported from on first use."""

# the contract, and finding a plug-in
from .protocol import GenericPlugin as GenericPlugin, QuantizerPlugin as QuantizerPlugin
from .registry import BACKENDS as BACKENDS, GROUP as GROUP, available as available, backends as backends
from .registry import quantizer as quantizer, resolve as resolve, spec_of as spec_of, unavailable as unavailable

# options, and settings for single modules and op types
from .options import Option as Option, check_options as check_options, describe as describe, options_of as options_of
from .scopes import Overrides as Overrides, Scope as Scope, check_overrides as check_overrides, scopes_in as scopes_in
from .scopes import called_modules as called_modules, modules_of as modules_of, op_type as op_type

# lowering and running, and what a backend takes
from .protocol import Backend as Backend, DeployedProgram as DeployedProgram, Ran as Ran
from .taps import attribute_of as attribute_of, handle_of as handle_of, observing as observing
from .taps import onednn_has_vnni as onednn_has_vnni, same_outputs as same_outputs, with_outputs as with_outputs
from .taps import write_atomic as write_atomic
from .backend_spec import BackendSpec as BackendSpec, OpSpec as OpSpec, SpecLine as SpecLine, TensorSpec as TensorSpec

# rules of the structure check
from .rules import DoesNotApplyError as DoesNotApplyError, Found as Found, Need as Need, Rule as Rule
from .rules import Severity as Severity

# override plans
from .code import Base as Base, Edit as Edit, NamedOp as NamedOp, OverridePlan as OverridePlan
from .code import edited_quantizer_code as edited_quantizer_code, modules_in_float as modules_in_float
from .code import ops_by_name as ops_by_name

# what a plug-in declares
from .registry import backend_of as backend_of, fusable_of as fusable_of, levels_of as levels_of
from .registry import quantizer_code as quantizer_code, rules_of as rules_of, unsupported_reason as unsupported_reason
