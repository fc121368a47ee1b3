"""Fault tests of ``meshwright faults`` without a schedule: files, disks, checkpoints and the network."""
