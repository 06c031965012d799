"""Commands that make and keep a site: its authority, its boards' certificates, its broker."""
