"""The devices of a site: the hub on the network, who is there, and what each measured."""
