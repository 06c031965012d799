"""Projects: a user's code as a working folder, a wheel, and a manifest that a site signs."""
