"""Who may do nothing at a site any more: how that comes to be, and how a server at work hears of it."""
