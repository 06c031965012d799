"""Commands of projects: a working folder, its wheel, and its publication on a site."""
