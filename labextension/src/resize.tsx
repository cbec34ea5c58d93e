import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { errorText } from './format';
import {
  COMPUTE_STEP_PERCENT,
  MEMORY_STEP_MIB,
  requestFromFields,
  resizeOffer,
  type ResizeOffer
} from './offer';
import type { IContext } from './parts';
import type { Resize as IResize } from './service';
import type { IThisSession } from './tokens';

/** The state of a request that a button starts: busy, done, or refused with a reason. */
export function useRequest(request: () => Promise<unknown>): {
  busy: boolean;
  done: boolean;
  refusal: string | null;
  run: () => void;
} {
  const [state, setState] = React.useState<'none' | 'busy' | 'done'>('none');
  const [refusal, setRefusal] = React.useState<string | null>(null);
  const run = async () => {
    if (state === 'busy') {
      return;
    }
    setState('busy');
    setRefusal(null);
    try {
      await request();
      setState('done');
    } catch (error) {
      setRefusal(errorText(error));
      setState('none');
    }
  };
  return {
    busy: state === 'busy',
    done: state === 'done',
    refusal,
    run: () => void run()
  };
}

/** The form for another amount of this session's GPU; nothing if its amount is fixed. */
export function Resize({ session, resize, context }: {
  session: IThisSession;
  resize: IResize;
  context: IContext;
}): JSX.Element | null {
  const { trans, actions } = context;
  const form = React.useRef<HTMLFormElement>(null);
  const offer = resizeOffer(session);
  const { busy, refusal, run } = useRequest(async () => {
    if (offer === null || session.id === null || form.current === null) {
      return;
    }
    const texts: Record<string, string> = {};
    new FormData(form.current).forEach((value, name) => {
      texts[name] = String(value).trim();
    });
    await actions.resize(session.id, requestFromFields(offer, texts));
  });
  if (offer === null) {
    return null;
  }
  if (offer.kind === 'none') {
    return (
      <p className="jp-fgpu-Minor">
        {trans.__('No other amount of its GPU is possible now.')}
      </p>
    );
  }
  const isResizing = busy || resize.state === 'ASKED';
  return (
    <form
      ref={form}
      className="jp-fgpu-Resize"
      // The service checks the amount: only it knows the nearest one that works.
      noValidate
      onSubmit={event => {
        event.preventDefault();
        if (!isResizing) {
          run();
        }
      }}
    >
      {/* The key makes new fields, which start with the session's new amount. */}
      <Fields key={session.amount} offer={offer} trans={trans} />
      <button type="submit" aria-disabled={isResizing}>
        {isResizing ? trans.__('Resizing…') : trans.__('Resize')}
      </button>
      <div role="status">
        {refusal !== null && !isResizing && (
          <p className="jp-fgpu-Problem">{trans.__('Not resized: %1', refusal)}</p>
        )}
      </div>
    </form>
  );
}

function Fields({ offer, trans }: {
  offer: Exclude<ResizeOffer, { kind: 'none' }>;
  trans: TranslationBundle;
}): JSX.Element {
  if (offer.kind === 'fgpu') {
    return (
      <>
        <NumberField
          label={trans.__('New amount in fGPU')}
          name="fgpu"
          min={offer.min}
          max={offer.max}
          step={offer.step}
          value={offer.now}
        />
        <span className="jp-fgpu-Minor" id="jp-fgpu-possible">
          {trans.__(
            'Possible now: %1 to %2. Your kernels run on.',
            offer.min,
            offer.max
          )}
        </span>
      </>
    );
  }
  return (
    <>
      <NumberField
        label={trans.__('GPU memory in MiB')}
        name="gpu_memory_mib"
        min={MEMORY_STEP_MIB}
        step={MEMORY_STEP_MIB}
        value={offer.memoryMib}
      />
      {offer.computePercent !== null && (
        <NumberField
          label={trans.__('Compute in percent')}
          name="compute_percent"
          min={COMPUTE_STEP_PERCENT}
          max={100}
          step={COMPUTE_STEP_PERCENT}
          value={offer.computePercent}
        />
      )}
      <span className="jp-fgpu-Minor" id="jp-fgpu-possible">
        {trans.__('Your kernels run on.')}
      </span>
    </>
  );
}

function NumberField({ label, value, ...rest }: {
  label: string;
  name: string;
  min: string | number;
  max?: string | number;
  step: string | number;
  value: string | number;
}): JSX.Element {
  return (
    <label>
      {label}
      <input
        type="number"
        defaultValue={value}
        aria-describedby="jp-fgpu-possible"
        {...rest}
      />
    </label>
  );
}
