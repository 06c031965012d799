"""Gateway of a site: certificates, broker files, enrolment, packages, revocation."""
