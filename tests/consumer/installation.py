# SPDX-License-Identifier: Apache-2.0
"""The library as a user gets it: meson install into a folder of the test's own."""

import glob
import os
import subprocess


class Installation:
    """What `meson install` of the present build put below folder."""

    def __init__(self, folder):
        self.folder = folder
        meson = os.environ.get("ZSPILL_MESON", "meson")
        command = [meson, "install", "-C", os.environ["ZSPILL_BUILD_ROOT"], "--no-rebuild"]
        done = subprocess.run(
            [*command, "--destdir", folder], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"meson install failed:\n{done.stdout}{done.stderr}"
        self.library = self.find("libzspill.so")
        self.pc_dir = os.path.dirname(self.find("zspill.pc"))

    def find(self, name):
        found = glob.glob(os.path.join(self.folder, "**", name), recursive=True)
        assert len(found) == 1, f"{name} is installed {len(found)} times: {found}"
        return found[0]

    def pkg_config(self, *args):
        env = dict(os.environ, PKG_CONFIG_SYSROOT_DIR=self.folder)
        env["PKG_CONFIG_PATH"] = self.pc_dir
        done = subprocess.run(
            ["pkg-config", *args, "zspill"], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"pkg-config {args} failed: {done.stderr}"
        return done.stdout.split()
