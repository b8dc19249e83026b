"""Does every operator compute the right results on this machine, and how fast is it?"""
