"""The last preload module of the fork server: prepares the reading of plans.

That takes 0.1 s of CPU time. Otherwise every rank would spend it, also the one that replaces a dead rank.
"""

from meshwright.plan.contract import plan_adapter

plan_adapter()
