"""The devices of a site: message hub, presence, reports and membership."""
