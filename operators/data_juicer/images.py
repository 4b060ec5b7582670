"""Image arrays of experiences as image files for Data-Juicer's image operators: `image_key: arrays.NAME`.

Arrays are stored in segments, apart from the columns of a batch, and are read only for a stage that names one. They never change, so
stored statistics stay valid. Operators get names (`pixels/7/0`) under `images` and PNG files under `image_bytes`.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from operators.data_juicer.catalogue import Facts
from rftdata.errors import ConfigError, OperatorError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

ARRAYS = "arrays"
"""First part of a path that leads to an array instead of a column."""

SHAPES = (
    "[height, width], [height, width, channels], [images, height, width, channels], or with the channels (1, 3 or 4) "
    "before height and width; uint8, or floats from 0 to 1; or the bytes of one image file"
)
_CHANNELS = (1, 3, 4)
_FILES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM")

logger = logging.getLogger(__name__)


def array_name(path: object) -> str | None:
    """Return the array that an argument names; None if it names a column."""
    root, _, name = str(path).partition(".")
    return name if root == ARRAYS and name else None


def check_arrays(facts: Facts, mode: str, *, is_task: bool) -> None:
    """Refuse an operator that cannot work on arrays.

    Raises:
        ConfigError: it reads only files, changes images, or runs where arrays are not available.
    """
    if is_task:
        raise ConfigError(
            "tasks have no arrays", todo="name the paths of their images, as image_key: metadata.images does"
        )
    if "image_bytes_key" not in facts.data_keys:
        raise ConfigError(f"{facts.name} reads images from files only", todo="name a column of paths with image_key")
    if facts.kind == "mapper" and (facts.rewrites or facts.makes_rows):
        raise ConfigError(
            "it changes images, but arrays stay as they were sampled",
            allowed="filters, deduplicators, selectors and mappers that tag",
        )
    if mode != "default":
        raise ConfigError("arrays are read in the pipeline worker only", value=f"mode: {mode}", todo="leave mode out")


def read_images(
    read: Callable[[Sequence[int], str], list[Array | None]] | None, ids: Sequence[int], name: str
) -> tuple[list[list[str]], list[list[bytes]]]:
    """Return names and files of the experiences' images; none for an experience without such an array.

    Raises:
        OperatorError: there is no buffer to read from, or an array is not an image.
    """
    if read is None:
        raise OperatorError("there is no buffer here to read arrays from", value=name)
    names, files = [], []
    arrays = read(ids, name)
    if ids and all(array is None for array in arrays):
        logger.warning("none of %d experiences has an array %r", len(ids), name)
    for key, array in zip(ids, arrays):
        try:
            content = [] if array is None else _files(np.asarray(array))
        except ValueError as error:
            raise OperatorError(
                f"the array {name!r} of experience {key} is not an image: {error}", allowed=SHAPES
            ) from error
        files.append(content)
        names.append([f"{name}/{key}/{number}" for number in range(len(content))])
    return names, files


def _files(array: Array) -> list[bytes]:
    if array.ndim == 1 and array.dtype == np.uint8:
        content = array.tobytes()
        if not content:
            return []
        if content.startswith(_FILES):
            return [content]
        raise ValueError("its bytes are not an image file of a known format")
    return [_png(image) for image in _each(_pixels(array))]


def _pixels(array: Array) -> Array:
    """Convert the values to 0 to 255."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return np.multiply(array, 255, dtype=np.uint8)
    if array.dtype.kind != "f":
        raise ValueError(f"its type is {array.dtype}")
    if array.size and not (array.min() >= 0 and array.max() <= 1):
        raise ValueError(f"its values lie from {array.min():.6g} to {array.max():.6g}")
    scaled: Array = np.rint(array * 255).astype(np.uint8)
    return scaled


def _each(array: Array) -> list[Array]:
    """Split an array into images of [height, width] or [height, width, channels]."""
    if 0 in array.shape:
        return []
    if array.ndim == 2:
        return [array]
    if array.ndim in (3, 4):
        if array.shape[-1] not in _CHANNELS:
            if array.shape[-3] not in _CHANNELS:
                raise ValueError(f"its shape is {list(array.shape)}")
            array = np.moveaxis(array, -3, -1)
        return [array] if array.ndim == 3 else list(array)
    raise ValueError(f"its shape is {list(array.shape)}")


def _png(image: Array) -> bytes:
    from PIL import Image

    if image.ndim == 3 and image.shape[-1] == 1:
        image = image[..., 0]
    content = io.BytesIO()
    # Lossless and fast; the file's size matters little here.
    Image.fromarray(np.ascontiguousarray(image)).save(content, "PNG", compress_level=1)
    return content.getvalue()
