"""The inputs of the worst cases as small pictures, waveforms or lists of tokens, for a chart."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from pt2qa._bad_cases.rows import Array, CaseRow, key_of
from pt2qa._report.charts import LONGEST
from pt2qa._report.formats import number

SHOWN: Final = 8
SIDE: Final = 112
"""Most pixels on a side, values of a waveform are as many."""

TOKENS: Final = 12
COLOURS: Final = (1, 3)


def chart_of(rows: Sequence[CaseRow], inputs: Mapping[str, Array], axis: int, unit: str) -> list[dict[str, Any]]:
    """A chart of the first rows, worst first, each with the first of its inputs that can be drawn; none if none can.

    Batches that are ranked or kept whole are not drawn.
    """
    drawn = []
    for row in rows[:SHOWN]:
        own = key_of(row.batch, row.sample, 0)[:-1]
        arrays = [each for key, each in inputs.items() if row.sample >= 0 and key.startswith(own)]
        shapes = (_drawn(each.take(0, axis)) for each in arrays if each.ndim > axis and each.shape[axis])
        found = next((each for each in shapes if each), None)
        if found is not None:
            drawn.append({"label": f"{row.index}: {number(row.value)}{unit}", **found})
    about = "Number and score of each, worst first; its first input that can be drawn, from the smallest value on."
    return [{"kind": "samples", "title": "Worst samples", "about": about, "samples": drawn}] if drawn else []


def _drawn(sample: Array) -> dict[str, Any] | None:
    """A PNG of what has the shape of a picture, a line of what has that of a waveform, the first of some tokens."""
    if sample.dtype.kind in "iu" and sample.ndim == 1:
        more = " …" if len(sample) > TOKENS else ""
        return {"text": " ".join(map(str, sample[:TOKENS].tolist())) + more} if len(sample) else None
    if sample.dtype.kind not in "fiu" or not sample.size:
        return None
    if sample.ndim == 1 and len(sample) > SIDE / 8:
        return {"line": [round(each, 3) for each in _scaled(sample[:: -(-len(sample) // SIDE)]).tolist()]}
    if sample.ndim == 3 and sample.shape[0] in COLOURS:
        sample = sample.transpose(1, 2, 0)
    if sample.ndim == 2:
        sample = sample[:, :, None]
    if sample.ndim != 3 or sample.shape[2] not in COLOURS or min(sample.shape[:2]) < 4:
        return None
    step = -(-max(sample.shape[:2]) // SIDE)
    pixels = (255 * _scaled(sample[::step, ::step])).round().astype(np.uint8)
    height, width, _ = pixels.shape
    return {"png": b64encode(_png(pixels)).decode(), "width": width, "height": height}


def _scaled(values: Array) -> Array:
    """From 0, the smallest value, to 1; what is not finite counts as 0."""
    values = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0).clip(-LONGEST, LONGEST)
    low, high = values.min(), values.max()
    return np.asarray((values - low) / ((high - low) or 1.0))


def _png(pixels: Array) -> bytes:
    """A picture of 8 bits, (height, width, 1 or 3), in the format of RFC 2083."""
    height, width, colours = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if colours == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
