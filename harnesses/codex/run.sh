#!/bin/sh
# Codex writes beside its configuration, so it gets a copy in the agent's home.
set -e
mkdir -p "$HOME/.codex"
cp /opt/harness/config.toml "$HOME/.codex/config.toml"
exec /opt/harness/node_modules/.bin/codex exec \
    --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
    --config "model_providers.etude.base_url=\"$OPENAI_BASE_URL\"" \
    --config "model_auto_compact_token_limit=${COMPACT_AT_TOKENS:-200000}" \
    -- "$1" </dev/null
