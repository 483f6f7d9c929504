"""Reports: tables and plots from several result files."""
