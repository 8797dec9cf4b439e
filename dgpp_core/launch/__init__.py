"""Worlds on several hosts: start, stop and look at them over SSH, and what has to be on the hosts for that."""
