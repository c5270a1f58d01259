"""One file per problem, each with a function `problem()`."""
