"""The wire: connections, keys, limits, errors, figures and traces, whatever the route."""
