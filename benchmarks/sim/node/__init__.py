"""What LeMix is compared with on simulated nodes."""
