# shellcheck shell=sh
# What prolog, task prolog and epilog of vgpud share. Not a program: it is read by them.

# quota, compute or hardware for jobs that take parts of cards; empty lets vgpud's policy choose
VGPUD_SLURM_ISOLATION=${VGPUD_SLURM_ISOLATION:-}

VGPUD_SLURM_DIR=${VGPUD_SLURM_DIR:-/run/vgpud/slurm}

# Slurm gives its prologs next to no environment.
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/lib/vgpud/bin

# asked JOB RESOURCE: what a job asked for of it on this node; "" if nothing. JOB is a line of scontrol; Slurm
# before 23.11 writes gres:NAME:N in it, later ones gres/NAME:N.
asked() {
  printf '%s\n' "$1" | sed -n "s/.* TresPerNode=\([^ ]*\).*/,\1,/p" | sed -n "s/.*[:,/]$2[:=]\([0-9]*\),.*/\1/p"
}
