"""Routes about the server itself: health, information, metrics, load, and pages for browsers."""
