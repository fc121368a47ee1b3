"""The first thing that the fork server imports: what follows makes objects that live as long as the process.

Python would look through all of them for garbage again and again, a tenth of the time of torch's import.
Ranks set aside what they are born with and look for garbage again (``launch.local``): it is neither looked
through nor copied in them.
"""

import gc

gc.disable()
