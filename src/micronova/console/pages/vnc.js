// A screen, drawn by noVNC.

import RFB from "./novnc/core/rfb.js";
import { connect, fail, show } from "./common.js";

const socket = await connect("vnc");
if (socket) {
  const screen = new RFB(document.getElementById("screen"), socket);
  screen.scaleViewport = true;
  screen.background = "transparent";
  const ctrlAltDel = document.getElementById("ctrl-alt-del");
  ctrlAltDel.addEventListener("click", () => {
    screen.sendCtrlAltDel();
    screen.focus();
  });
  screen.addEventListener("connect", () => {
    show("connected", "good");
    ctrlAltDel.disabled = false;
    screen.focus();
  });
  screen.addEventListener("disconnect", () => {
    ctrlAltDel.disabled = true;
  });
  screen.addEventListener("securityfailure", () => fail("The server's screen wants a password, and there is none."));
  screen.addEventListener("credentialsrequired", () => screen.disconnect());
}
