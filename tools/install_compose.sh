#!/usr/bin/env bash
# Puts docker's command line and compose v2 on a Debian machine that has none, without an engine: enough for `docker compose config`.
# Debian 12's own docker-compose is version 1, so both come from Debian 13 as unpacked files; apt's sources and packages stay as they are.
set -euo pipefail

docker compose version >/dev/null 2>&1 && exit 0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mirror=$(apt-get indextargets --format '$(SITE)' | grep -m1 '/debian$' || echo http://deb.debian.org/debian)
mkdir -p "$scratch"/{lists,cache/archives}/partial "$scratch/files"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$scratch/sources.list"
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$scratch/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$scratch/lists"
    -o "Dir::Cache=$scratch/cache" -o APT::Sandbox::User=root -o Acquire::Retries=3)
"${apt[@]}" update
cd "$scratch"
"${apt[@]}" download docker-cli docker-compose
for package in ./*.deb; do dpkg-deb --extract "$package" files; done
plugins=/usr/libexec/docker/cli-plugins
install -D -m 755 files/usr/bin/docker /usr/local/bin/docker
install -D -m 755 "$(find files -type f -name docker-compose -size +10M | head -1)" "$plugins/docker-compose"
docker compose version
