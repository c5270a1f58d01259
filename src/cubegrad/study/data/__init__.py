"""One file per data set: where it comes from, its checksums, its reader.

No data set comes with the package. A reader looks in the given folder and raises StudyError, one
line with the remedy, for missing, truncated or malformed data.
"""
