"""Transfer of payloads in frames: send, receive, request missing blocks again."""
