"""HTTP: middleware, routes and bodies of each API dialect."""
