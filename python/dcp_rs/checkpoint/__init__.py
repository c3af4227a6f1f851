"""What is on disk, without DCP: found, opened, streamed, verified, compared."""
