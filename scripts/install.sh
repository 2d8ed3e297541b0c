# To be sourced: `install_into PYTHON CONSTRAINTS WHAT...` installs packages into the environment of an interpreter.

# uv installs in seconds what takes pip a minute. It is fetched by pip, whose settings (mirrors, proxies' certificates) it is
# given; where it cannot be had, or INSTALLER=pip says so, pip does all.
install_into() {
  local python=$1 constraints=$2
  shift 2
  if uv_of "$python" "$constraints"; then
    "$python" -m uv pip install --python "$python" --constraint "$constraints" --index-strategy unsafe-best-match "$@"
  else
    "$python" -m pip install --progress-bar off --constraint "$constraints" "$@" | { grep --line-buffered -v '^Requirement already' || true; }
  fi
}

uv_of() {
  if [ "${INSTALLER:-}" = pip ]; then return 1; fi
  "$1" -c 'import uv' 2>/dev/null || "$1" -m pip install --quiet --constraint "$2" uv >/dev/null 2>&1 || {
    echo "setup: uv cannot be installed here, so pip does it, which takes longer"
    return 1
  }
  pip_settings "$1"
}

# The settings of pip that say where packages come from, as those of uv.
pip_settings() {
  local key value
  while read -r key value; do
    case "$key" in
      index-url) export UV_DEFAULT_INDEX="$value" ;;
      extra-index-url) export UV_INDEX="$value" ;;
      find-links) export UV_FIND_LINKS="$value" ;;
      cert) export SSL_CERT_FILE="$value" ;;
    esac
  done < <("$1" -m pip config list 2>/dev/null | sed -nE "s/^[^=]*\.([a-z-]+)='(.*)'\$/\1 \2/p")
}
