"""A setting of the whole test run, made before torch is imported."""

import os

# Small models gain nothing from threads, and a barrier between threads waits for whoever else has the processor.
os.environ.setdefault("OMP_NUM_THREADS", "1")
