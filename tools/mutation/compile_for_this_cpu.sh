#!/bin/sh
# CMake calls the compiler through this script. With SEQWARM_ONLY_CAPABILITY=AVX512, say, the files that are compiled
# for each kind of CPU are compiled for that kind only. The others keep their objects.
case " $* " in
*" -DCPU_CAPABILITY=${SEQWARM_ONLY_CAPABILITY:-}"*) exec "$@" ;; # also if none is chosen
*" -DCPU_CAPABILITY="*) ;;
*) exec "$@" ;;
esac
while [ "$1" != -o ]; do shift; done
touch "$2"
