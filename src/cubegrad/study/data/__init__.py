"""Where each data set comes from, its checksums, its reader: one file a set.

No data set comes with the package. A reader looks in the folder it is given and raises StudyError,
one line with the remedy, for what is missing, cut off or malformed.
"""
