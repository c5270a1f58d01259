"""One file a problem, each with a function `problem()`."""
