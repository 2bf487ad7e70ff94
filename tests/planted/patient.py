"""A kernel whose fault shows in the finals only, for AUTOFLASH_TEST_KERNELS.

Before them it is launched 111 times at most (4 checks, 7 first samples, 100 more); in them, at
least 7 rounds of 3 after 2 to warm up. Of a kernel this fast it is 30 a round.
"""

from tests.planted import Planted


class Patient(Planted):
    """Right, until the 151st launch writes far outside of any buffer."""

    name = "planted_patient"
    plant = "late_write"
    harmless_launches = 150


KERNELS = (Patient(),)
