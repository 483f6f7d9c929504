"""Pages for browsers: the web page at `/`, and the list of routes at `/docs`."""
