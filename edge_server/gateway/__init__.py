"""A site's own authority and what it makes: certificates, the broker's files, enrolment, revocation."""
