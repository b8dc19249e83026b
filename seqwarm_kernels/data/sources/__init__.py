"""Where items come from: sequences, streams, and chunk files, in a resumable order."""
