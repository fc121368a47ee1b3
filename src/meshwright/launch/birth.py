"""The first thing that the fork server imports: what follows makes objects that live as long as the process.

Python would look through all of them again and again for garbage, a tenth of the time that torch's import takes.
Ranks set what they are born with aside and look for garbage again (``launch.local``), so that it is neither looked
through nor copied in them.
"""

import gc

gc.disable()
