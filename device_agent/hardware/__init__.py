"""A board's command-line tools and recorded folders, and whether its libraries run."""
