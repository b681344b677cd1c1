"""Simulated disks and devices, for tests; the package itself never imports them."""
