"""The same agents and server in one process, on virtual time. The only package that knows both sides."""
