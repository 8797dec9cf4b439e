"""GPU kernels in Gluon and Triton. Imported only for a CUDA tensor or to compile ahead of time.

Every module with kernels has `compile_cases()`, which names each binary that can be launched at run time: the tests
compile all of them for every supported GPU without one, and the tables of docs/kernels.md come from there.
"""
