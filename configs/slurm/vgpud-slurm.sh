# shellcheck shell=sh
# What prolog, task prolog and epilog of vgpud share. Not a program: it is read by them.

# quota, compute or hardware for jobs that take parts of cards; empty lets vgpud's policy choose
VGPUD_SLURM_ISOLATION=${VGPUD_SLURM_ISOLATION:-}

VGPUD_SLURM_DIR=${VGPUD_SLURM_DIR:-/run/vgpud/slurm}

# Slurm gives its prologs next to no environment.
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/lib/vgpud/bin

# asked TRES RESOURCE: what a job asked for of it on a node; "" if nothing. TRES is Slurm's own list, which has no
# text of the user's in it; Slurm before 23.11 writes gres:NAME:N in it, later ones gres/NAME:N.
asked() {
  printf ',%s,\n' "$1" | sed -n "s/.*[:,/]$2[:=]\([0-9]*\),.*/\1/p"
}
