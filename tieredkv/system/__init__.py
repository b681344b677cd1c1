"""The doors to time and durable files, so that tests can crash, tear, delay and replay."""

from .clock import Clock, SystemClock
from .fs import NO_FILE, NOT_NOW, Buffer, File, Fs, Lock, OsFs, path_of

__all__ = ["NOT_NOW", "NO_FILE", "Buffer", "Clock", "File", "Fs", "Lock", "OsFs", "SystemClock", "path_of"]
