import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { KernelMessage } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';

// With their endings, because the tests load this module as it is compiled, without a bundler.
import { durationText, waitText } from './format.js';
import { cellOf, type ICell, watchNotebooks } from './notebook.js';
import type { IFGPUModel } from './tokens';

/** Milliseconds between two reads while a cell may wait: most waits are short. */
const READ_EVERY_MS = 2000;
/** Key in the line's metadata by which it is found again. */
const MARK = 'fgpu_wait';

/** Show in a running cell that the session waits for its GPU, in one line, and afterwards how long that took. */
export function watchForWaits(
  app: JupyterFrontEnd,
  model: IFGPUModel,
  trans: TranslationBundle
): void {
  watchNotebooks(app, panel => {
    /** The running cell, and since when it may have been waiting. */
    let run: { cell: ICell; since: number; isWaiting: boolean } | null = null;
    let timer = 0;

    const readSoon = () => {
      window.clearTimeout(timer);
      timer = window.setTimeout(() => void model.refresh(), READ_EVERY_MS);
    };
    const endWait = () => {
      if (run?.isWaiting) {
        run.isWaiting = false;
        const tookS = (Date.now() - run.since) / 1000;
        write(run.cell, trans.__('Waited %1 for the GPU.', durationText(tookS, trans)));
      }
    };
    const onStatus = () => {
      const session = model.reading.status?.session ?? null;
      if (run === null || session === null) {
        return;
      }
      const text = waitText(session, Date.now(), trans);
      if (text !== null) {
        run.isWaiting = true;
        write(run.cell, text);
        readSoon();
      } else {
        endWait();
        run.since = Date.now();
      }
    };
    const onMessage = (message: KernelMessage.IIOPubMessage) => {
      const { msg_type } = message.header;
      if (msg_type !== 'execute_input' && msg_type !== 'status') {
        return;
      }
      const cell = cellOf(panel, message);
      if (cell !== undefined && msg_type === 'execute_input') {
        run = { cell, since: Date.now(), isWaiting: false };
        if (model.reading.status?.session?.parked) {
          readSoon();
        }
      } else if (cell !== undefined && cell === run?.cell && isIdle(message)) {
        endWait();
        run = null;
      }
    };
    model.statusReceived.connect(onStatus);
    return {
      onMessage,
      dispose: () => {
        window.clearTimeout(timer);
        model.statusReceived.disconnect(onStatus);
      }
    };
  });
}

function isIdle(message: KernelMessage.IIOPubMessage): boolean {
  return (message.content as { execution_state?: string }).execution_state === 'idle';
}

/** Write the line after the cell's output, or in place of the line that it has already. */
function write(cell: ICell, text: string): void {
  const { outputs } = cell.model;
  if (cell.isDisposed || outputs === undefined) {
    return;
  }
  // Not a stream: the kernel's own output would go on in the same line.
  const line = {
    output_type: 'display_data' as const,
    data: { 'text/plain': text },
    metadata: { [MARK]: text }
  };
  for (let index = outputs.length - 1; index >= 0; index--) {
    const before = outputs.get(index).metadata[MARK];
    if (before !== undefined) {
      if (before !== text) {
        outputs.set(index, line);
      }
      return;
    }
  }
  outputs.add(line);
}
