"""The doors to time and durable files, so that tests can crash, tear, delay and replay."""

from .clock import Clock, SystemClock
from .fs import Buffer, File, Fs, Lock, OsFs

__all__ = ["Buffer", "Clock", "File", "Fs", "Lock", "OsFs", "SystemClock"]
