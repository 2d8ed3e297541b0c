"""A stand-in for the vendor's software of today on a machine without a card, which writes down what is called.

`record.py` has the order of the calls and the environment at that time. It proves the order of the documented calls, their
arguments, and the variables; nothing computes on its device `hpu`.
"""

from habana_frameworks.record import VARIABLES, record

record("import habana_frameworks", variables=VARIABLES)
