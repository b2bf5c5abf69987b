"""The server's own routes: warming, sessions and figures."""
