"""One module a backend; none is imported before it is wanted."""
