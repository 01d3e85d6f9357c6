"""The section of the configuration that says how images, sounds and videos are read: `data.media`.

Part of the tree's `data` section; read by `relax.data.media` and by the check of the bus's capacity.
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import ByteSize, Field, PositiveFloat, PositiveInt

from relax.config.base import Config

Size: TypeAlias = Annotated[ByteSize, Field(gt=0)]


class ImageSection(Config):
    """Images."""

    max_pixels: PositiveInt = 64_000_000
    """A larger image is refused before it is decoded."""
    max_aspect: Annotated[float, Field(ge=1)] = 200.0
    """Longest side over shortest; beyond it an image is refused."""
    resize_max_pixels: PositiveInt | None = None
    """Larger images are made smaller; null: what the model's processor says."""


class AudioSection(Config):
    """Sounds."""

    max_s: PositiveFloat = 600.0
    """A longer sound is refused before it is decoded."""


class VideoSection(Config):
    """Videos."""

    max_s: PositiveFloat = 3600.0
    """A longer video is refused, unless its part trims it to less."""
    max_pixels: PositiveInt = 16_000_000
    """Pixels of one frame; a larger one is refused before it is decoded."""
    fps: PositiveFloat | None = None
    """Frames to take of each second; null: what the model's processor says."""
    min_frames: PositiveInt | None = None
    """Fewest frames to take; null: what the model's processor says."""
    max_frames: PositiveInt | None = None
    """Most frames to take; null: what the model's processor says."""
    resize_max_pixels: PositiveInt | None = None
    """Pixels of all frames together that they are made smaller to; null: what the model's processor says."""
    audio: bool = False
    """Read the sound of videos that have one, for models that hear (a part's `audio` says so for itself)."""


class MediaSection(Config):
    """How images, sounds and videos of records are read, and what is refused before it is decoded (MM3, MM6)."""

    image: ImageSection = Field(default_factory=ImageSection)
    """Images."""
    audio: AudioSection = Field(default_factory=AudioSection)
    """Sounds."""
    video: VideoSection = Field(default_factory=VideoSection)
    """Videos."""
    roots: tuple[str, ...] = ()
    """Folders that media paths may lie in; empty: the folder of the source's own file, or the working directory where it has none."""
    hosts: tuple[str, ...] = ()
    """Hosts that media may be fetched from by http and https; empty: none."""
    fetch_s: PositiveFloat = 30.0
    """Seconds that fetching one medium may take."""
    max_bytes: Size = ByteSize(256 << 20)
    """Most bytes of one medium as it lies on disk, in a record or on the web."""
    max_per_prompt: PositiveInt = 16
    """Most media of one prompt."""
    max_feature_bytes: Size = ByteSize(16 << 20)
    """Most bytes of the features of one prompt; the bus reserves them for every group in flight (TQ5)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format in which features are kept and carried."""
    processes: PositiveInt = 1
    """Processes that decode."""
    time_s: PositiveFloat = 30.0
    """Seconds that decoding one medium may take."""
    memory: Annotated[ByteSize, Field(ge=256 << 20)] = ByteSize(2 << 30)
    """Memory that decoding one medium may take; the decoders alone need half of the least."""
    cache: str | None = None
    """Folder of features that were computed before; null: what RELAX_CACHE names, else `relax` in the user's cache folder."""
    cache_bytes: Annotated[ByteSize, Field(ge=0)] = ByteSize(2 << 30)
    """Most bytes of that folder; the features used longest ago go first. 0 keeps none."""
    held_bytes: Size = ByteSize(256 << 20)
    """Most bytes of features held in memory beside those of groups in flight; of data URIs that environments gave, as much again."""
