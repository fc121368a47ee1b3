"""The last preload module of the fork server: prepares the reading of plans.

This saves every rank, also one that replaces a dead rank, 0.1 s of CPU time.
"""

from meshwright.plan.contract import plan_adapter

plan_adapter()
