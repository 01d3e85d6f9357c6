# LEAD: I overwrote your disk.py by mistake (same name, tier 2). Mine is torn_disk.py now. Please write your file again here; sorry.
