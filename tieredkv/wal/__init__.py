"""The log's bytes: records in frames, frames in segments, segments in a chain."""

from .format import CheckpointRef, LogPosition, SegmentHeader, frame_nbytes, segment_name
from .records import Run
from .writer import LogWriter

__all__ = [
    "CheckpointRef",
    "LogPosition",
    "LogWriter",
    "Run",
    "SegmentHeader",
    "frame_nbytes",
    "segment_name",
]
