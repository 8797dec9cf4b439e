"""A simulator of worlds: real loops, scheduler, journal and front end, on a clock, network and device of its own."""
